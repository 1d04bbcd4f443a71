from crosstrain.components.core.step import main

main("consolidate")
