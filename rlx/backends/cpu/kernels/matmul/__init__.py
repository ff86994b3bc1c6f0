"""Matrix products: the kernel around blocks of sums, and the list of strategies, which differ in their panel format."""
