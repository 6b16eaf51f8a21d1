"""What one request or tenant may take."""
