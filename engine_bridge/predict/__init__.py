"""What is predicted from what was seen: step times and output lengths. Cheap to import: scikit-learn and numpy load where they are used."""
