"""statestore room"""
