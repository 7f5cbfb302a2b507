"""The learner and the loop around it."""
