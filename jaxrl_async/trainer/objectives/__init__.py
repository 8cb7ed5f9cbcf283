"""What an update minimizes, one file per job."""
