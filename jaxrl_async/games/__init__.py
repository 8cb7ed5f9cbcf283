"""Wing: games of several seats, and the other players (seats)."""
