"""Word problems whose worked solutions are long, and the recipe that teaches them to SmolLM2 before a study.

python -m qerl train lab/worked/sft.yaml                # runs/worked, a whole model
python -m lab study worked worked-problems runs/worked-doses.yaml
"""
