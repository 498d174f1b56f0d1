"""Policy-gradient surrogates: what an advantage is multiplied with, and what is clipped."""
