from crosstrain.components.core.step import main

main("compare_arms")
