"""The real scheduler, pool, store and loop against models of engine, sandbox and learner, in virtual time."""
