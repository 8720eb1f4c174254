"""scheduling room"""
