"""Wing: launch runs on GKE and on Ray."""
