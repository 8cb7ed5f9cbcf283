"""The data of the small tool environment in shop_*.py: prices, and a question about them."""

RECORDS = [
    {
        "question": f"What do milk and bread cost together, today {day}?",
        "prices": {"milk": 1.0 + day / 4, "bread": 2.5, "eggs": 3.0},
        "answer": f"{3.5 + day / 4}",
    }
    for day in range(100)
]
