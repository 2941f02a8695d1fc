"""New York's flights of 2013 with the weather at their departure, by carrier and hour."""

from minishuffle.pipelines.flights.pipeline import Flights, flights

__all__ = ["Flights", "flights"]
