"""The endpoint: requests to turns, replies to clients. Independent of judge and trainer."""
