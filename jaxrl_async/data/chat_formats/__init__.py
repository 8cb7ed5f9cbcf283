"""Writers of messages as token ids."""
