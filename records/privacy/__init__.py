"""What must not be stored: secrets and personal data, found and removed. It knows no tables."""
