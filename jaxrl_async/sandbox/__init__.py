"""Wing: sandboxes for code that the policy writes, tasks with code, and Harbor's tasks."""
