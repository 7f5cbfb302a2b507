"""From a task and a policy to a recorded trajectory."""
