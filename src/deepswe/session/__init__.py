"""The parts put together: a run from its recipe to its report."""
