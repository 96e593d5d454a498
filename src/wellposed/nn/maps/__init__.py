"""The maps z -> f(z) of cells with structure: products, resolvents and pullbacks by formula."""
