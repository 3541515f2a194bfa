"""Staged transfers: P packs blocks, writes them into a slot of D's, D unpacks them. P never writes into D's cache."""

from kvpush.transfer.staging.area import StagingArea
from kvpush.transfer.staging.memory import Staging
from kvpush.transfer.staging.stager import Stager
from kvpush.transfer.staging.unstager import Unstager

__all__ = ["Stager", "Staging", "StagingArea", "Unstager"]
