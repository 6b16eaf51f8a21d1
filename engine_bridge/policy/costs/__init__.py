"""What work costs on this machine, from measured steps and copies."""
