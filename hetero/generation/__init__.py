"""Text from prompts: the loaded model, the loop over tokens, sampling, drafts."""
