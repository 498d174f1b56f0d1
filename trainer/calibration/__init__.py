"""Whether engines and trainer agree, and whether the policy as its own teacher teaches nothing."""
