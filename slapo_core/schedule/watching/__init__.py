"""What a live model carries so that plain tools around it cannot train, save or load it wrongly in silence."""
