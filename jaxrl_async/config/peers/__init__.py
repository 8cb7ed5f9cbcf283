"""Settings of TRL, verl and Tunix, and the settings here that mean the same. Plain data."""
