"""What every agent here talks about. The agents are run by the foreign Python, with SERVED_URL."""

import json
import os

URL = os.environ["SERVED_URL"]
SYSTEM = "You are a traveller's helper."
USERS = json.loads(os.environ["USERS"])
RESULT = os.environ["RESULT"]


def tell(text: str) -> None:
    """One answer, for the test to read."""
    print(json.dumps({"answer": text}), flush=True)
