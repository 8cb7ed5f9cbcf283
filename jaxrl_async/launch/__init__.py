"""Wing: runs on GKE and on Ray."""
