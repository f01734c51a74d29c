"""Programs that measure or predict which settings are fastest. They leave no trained model."""
