"""A simulator of whole deployments: many engines, their schedulers, transfers and faults, in virtual time.

The protocol, the transfer core, the fence and the scheduler halves are the real ones; the model, vLLM's scheduler, the
network and the processes are small models of their own. See docs/simulator.md.
"""
