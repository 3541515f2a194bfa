"""A deployment under load in which something breaks every few seconds: no answer may be wrong, nothing may be left.

python -m kvpush.bench.soak --minutes 15 --seed 1
"""
