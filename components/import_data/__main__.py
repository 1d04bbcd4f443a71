from crosstrain.components.core.step import main

main("import_data")
