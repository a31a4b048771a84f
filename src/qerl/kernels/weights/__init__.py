"""Products of activations with packed and dense weights."""
