"""What must not be stored: secrets and personal data, found and taken out. It knows no tables."""
