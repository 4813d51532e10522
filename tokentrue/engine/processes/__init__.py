"""One model in several processes: by layers, or every layer in parts."""
