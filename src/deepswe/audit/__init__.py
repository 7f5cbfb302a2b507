"""Scripted attackers, a grader that falls for them, and honest but unusual work: whether the reward can be trusted."""
