"""The maps z -> f(z) of cells whose structure is known: products, resolvents and pullbacks in closed form."""
