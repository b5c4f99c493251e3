"""Whether ranks train the same model: what they show of it, and what an error says if not.

digests        numbers that stand for arrays, independent of framework and layout
verification   the words that an optimizer's headers carry, and their comparison
constants      the hyperparameters of optimizers that are functions, as in optax
differences    where trees or settings differ, in words
sameness       `raise_on_difference`
"""
