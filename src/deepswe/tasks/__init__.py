"""What is to be solved: tasks, their hidden tests, and where both come from."""
