"""A real instruct model, distilled on two CPU cores: bash examples/real_model/run.sh"""
