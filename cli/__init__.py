"""cli room"""
