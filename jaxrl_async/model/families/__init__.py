"""Model families, one record each."""
