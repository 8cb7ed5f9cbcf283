"""Wing: games of several seats, and who plays against the policy (seats)."""
