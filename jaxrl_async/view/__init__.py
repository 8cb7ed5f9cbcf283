"""Wing: the dashboard of runs, and the report."""
