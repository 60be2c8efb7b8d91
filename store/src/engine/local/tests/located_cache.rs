//! Versions that stay open between reads.

use super::*;

#[tokio::test]
async fn located_versions_stay_open_up_to_limit() {
    let controller = HookedVolume::default().controller();
    let store = Store::new(controller.clone());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    let keys: Vec<_> =
        (0..=MAX_LOCATED_KEYS).map(|it| Key::new(format!("{it:02}")).unwrap()).collect();
    for key in &keys {
        store.put_state_dict(key, &dict, &options).await.unwrap();
    }
    let locate = async |key| controller.locate(key, Selector::Newest).await.unwrap().lease;
    let first = locate(&keys[0]).await;
    for key in &keys[1..MAX_LOCATED_KEYS] {
        locate(key).await;
        assert!(Arc::ptr_eq(&first, &locate(&keys[0]).await), "it is still open");
    }
    locate(&keys[MAX_LOCATED_KEYS]).await;
    assert_eq!(controller.located_cache().located.len(), MAX_LOCATED_KEYS);
}

#[tokio::test(flavor = "multi_thread")]
async fn version_deleted_during_open_does_not_stay_open() {
    let volume = HookedVolume::default();
    let controller = volume.controller();
    let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
    let (dict, options) = (tssd_format::StateDict::new(), PutOptions::default());
    let id = store.put_state_dict(&key, &dict, &options).await.unwrap().id;
    let (closing, closed) = (controller.clone(), key.clone());
    volume.before("open", move || {
        closing.evict_located(&closed, id);
        Ok(())
    });
    controller.locate(&key, Selector::Newest).await.unwrap();
    assert!(controller.located_cache().located.is_empty(), "it is about to be deleted");
    controller.locate(&key, Selector::Newest).await.unwrap();
    assert!(controller.located_cache().located.contains_key(&key));
    store.delete(&key, None).await.unwrap();
    assert!(controller.located_cache().located.is_empty());
}

#[tokio::test]
async fn replaced_version_does_not_stay_open() {
    let controller = HookedVolume::default().controller();
    let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
    let (dict, other) = (tssd_format::StateDict::new(), Key::new("other").unwrap());
    for key in [&key, &other] {
        store.put_state_dict(key, &dict, &PutOptions::default()).await.unwrap();
        controller.locate(key, Selector::Newest).await.unwrap();
    }
    store.put_state_dict(&key, &dict, &PutOptions::default()).await.unwrap();
    assert!(
        controller.located_cache().located.keys().eq([&other]),
        "its room is free, though nobody comes to read"
    );
}
