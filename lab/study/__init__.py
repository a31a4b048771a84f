"""Studies: many small runs that differ in arm, seed and learning rate, computed side by side on one base."""
