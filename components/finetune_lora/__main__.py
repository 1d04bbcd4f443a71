from crosstrain.components.core.step import main

main("finetune_lora")
