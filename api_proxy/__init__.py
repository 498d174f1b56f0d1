"""The endpoint: requests to turns, replies to clients. It knows no judge and no trainer."""
