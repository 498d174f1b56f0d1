"""The rollout side of the slime plugin: turns handed over, scores and lessons carried along."""
