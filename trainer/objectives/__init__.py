"""Objectives as pure functions of tensors. They know no batch of turns, no model and no file."""
