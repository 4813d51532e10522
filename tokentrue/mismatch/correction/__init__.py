"""What a correction is made of, and `correct`."""
