"""Streams of Apache Kafka."""

from monolith.streams.kafka.reader import KafkaReader
from monolith.streams.kafka.stream import KafkaStream
from monolith.streams.kafka.writer import KafkaWriter

__all__ = ["KafkaReader", "KafkaStream", "KafkaWriter"]
