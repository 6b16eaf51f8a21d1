"""What clients say of KV beside their requests: read in whatever form they have, granted within a key's share, acted on."""
