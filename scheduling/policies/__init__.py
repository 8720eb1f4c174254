"""scheduling/policies room"""
